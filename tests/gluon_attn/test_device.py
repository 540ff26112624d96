"""What is known of a card, real or described, and for which of them there are kernels."""

import re

import pytest
import torch

from gluon_attn import attention
from gluon_attn.device import Device, described_once

BLACKWELL, BLACKWELL_ULTRA = Device.blackwell(), Device.blackwell_ultra()


def test_hopper_is_an_h200():
    h200 = Device.hopper()
    assert (h200.capability, h200.sm_count, h200.smem_bytes) == ((9, 0), 132, 232448)
    assert "H200" in h200.name


@pytest.mark.parametrize(("device", "capability", "arch"), [(BLACKWELL, (10, 0), 100), (BLACKWELL_ULTRA, (10, 3), 103)])
def test_blackwell_is_supported(device, capability, arch):
    device.require_supported()
    assert (device.capability, device.arch, device.sm_count, device.smem_bytes) == (capability, arch, 148, 232448)


# Other cards; that there are tensor cores in them does not make the kernels run.
CARDS = {
    "Ampere": ((8, 0), 108, 166912),
    "Ada": ((8, 9), 142, 101376),
    "Blackwell, automotive": ((11, 0), 20, 232448),
    "Blackwell, workstation": ((12, 0), 188, 101376),
}


@pytest.mark.parametrize(("capability", "sm_count", "smem_bytes"), CARDS.values(), ids=CARDS.keys())
def test_another_card_is_refused(capability, sm_count, smem_bytes):
    card = Device(name="a card", capability=capability, sm_count=sm_count, smem_bytes=smem_bytes)
    with pytest.raises(RuntimeError) as caught:
        card.require_supported()
    assert type(caught.value) is RuntimeError
    found = re.escape(f"{capability[0]}.{capability[1]}")
    why = r"[^;]*: (\w+[ ,-]+){3,}"  # a reason in words follows what was found
    assert re.search(
        rf"^device: expected .*Hopper.*9\.0.*Blackwell.*10\.0 or 10\.3.*, got a card.*{found}{why}", str(caught.value)
    ), caught.value


def test_attention_refuses_another_card():
    q = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16)
    ampere = Device(name="a card", capability=(8, 0), sm_count=108, smem_bytes=166912)
    with pytest.raises(RuntimeError, match=r"^device: expected a Hopper .*, got a card \(8\.0\)"):
        attention(q, q, q, device=ampere)


@pytest.mark.parametrize(("kind", "todo"), [("cpu", "device=Device.hopper()"), ("meta", "make q, k and v on the card")])
def test_what_is_no_card(kind, todo):
    with pytest.raises(RuntimeError, match=rf"^q: expected a tensor on a .* card, got one on '{kind}'.*") as caught:
        Device.of(torch.device(kind))
    assert todo in str(caught.value)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_card_is_found_in_a_graph_without_warning(monkeypatch):
    class Properties:
        name, major, minor = "NVIDIA H100", 9, 0
        multi_processor_count, shared_memory_per_block_optin, L2_cache_size = 132, 232448, 50 * 2**20

    def times(x: torch.Tensor) -> torch.Tensor:
        card = Device.of(torch.device("cuda", 5))
        card.require_supported()
        return x * card.sm_count * card.arch

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    try:
        assert torch.compile(times, backend="eager", fullgraph=True)(torch.ones(1)) == 132 * 90
        assert times(torch.ones(1)) == 132 * 90
        assert Device.of(torch.device("cuda", 5)) is Device.of(torch.device("cuda", 5))
    finally:
        described_once.cache_clear()
