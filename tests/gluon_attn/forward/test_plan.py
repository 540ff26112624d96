"""How problems are laid out over a card."""

import dataclasses

import pytest
import torch

from gluon_attn.device import Device
from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import blackwell_config, hopper_config
from gluon_attn.problem import Problem

H200, B200 = Device.hopper(), Device.blackwell()
CONFIG = hopper_config(2, 128, 2, 2, 232)  # 128 rows
TWO_CTAS = hopper_config(2, 128, 2, 2, 232, num_ctas=2)  # 256 rows
PREFILL = Problem(
    dtype=torch.bfloat16, batch=1, heads=32, kv_heads=8, q_len=4096, kv_len=4096, head_dim=128,
    causal=True, scale=0.1, layout="bhsd",
)  # fmt: skip


def plan(chosen: ForwardConfig = CONFIG, device: Device = H200, **changes) -> Plan:
    return Plan.of(dataclasses.replace(PREFILL, **changes), chosen, device)


def test_one_program_for_each_cluster_that_fits_the_card():
    assert plan().programs == 132
    assert plan(TWO_CTAS).programs == 66


def test_never_more_programs_than_items():
    assert plan(heads=2, q_len=300).programs == 6  # three row blocks of each head
    assert plan(heads=1, q_len=1).programs == 1


@pytest.mark.parametrize("longest_first", [False, True])
def test_a_program_for_each_item_beside_transfers(longest_first):
    """However many of them the card has room for, the items are the same."""
    config = dataclasses.replace(CONFIG, last_heads_longest_first=longest_first)
    shared = Plan.of(PREFILL, config, H200, card_is_shared=True)
    assert shared.programs == shared.items
    assert dataclasses.replace(shared, programs=132) == Plan.of(PREFILL, config, H200)


def test_items_of_an_odd_number_of_row_blocks():
    """On Hopper the middle one of three is an item; on Blackwell it is one with that of the next head."""
    assert plan(heads=64, q_len=300, kv_len=300).items == 64 * 2
    assert plan(BLACKWELL, device=B200, heads=64, q_len=700, kv_len=700).items == 64 * 3 // 2


@pytest.mark.parametrize(
    ("blocks_per_item", "changes"),
    [
        pytest.param(2, {}, id="causal"),
        pytest.param(1, {"causal": False}, id="no mask: row blocks cost the same"),
        pytest.param(1, {"heads": 4}, id="a program for each row block"),
        pytest.param(1, {"kv_len": 65536}, id="few queries at the end of many keys: row blocks cost about the same"),
        pytest.param(2, {"q_len": 8192, "kv_len": 4096}, id="more queries than keys: the first ones see nothing"),
        pytest.param(1, {"left": 64}, id="a narrow window: row blocks cost about the same"),
        pytest.param(1, {"left": 2048}, id="a window of half the keys: half of all pairs would cost twice as much"),
        pytest.param(2, {"left": 3900}, id="a window of nearly all keys"),
    ],
)
def test_items_of_two_only_where_they_even_something_out(blocks_per_item, changes):
    assert plan(**changes).blocks_per_item == blocks_per_item


LONGEST_FIRST = dataclasses.replace(CONFIG, last_heads_longest_first=True)


@pytest.mark.parametrize(
    ("heads", "changes"),
    [
        pytest.param(9, {}, id="132 items of two are those of 8.25 heads"),
        pytest.param(5, {"q_len": 8192, "kv_len": 8192, "heads": 8}, id="of 4.125 heads"),
        pytest.param(9, {"batch": 2, "heads": 16}, id="counted through all batches"),
        pytest.param(0, {"causal": False}, id="no items of two: row blocks cost the same"),
        pytest.param(0, {"q_len": 512, "kv_len": 512, "heads": 256}, id="four row blocks to a head"),
        pytest.param(44, {"q_len": 513, "kv_len": 513, "heads": 256}, id="five: of 44 heads"),
        pytest.param(9, {"heads": 9}, id="all heads"),
        pytest.param(0, {"heads": 8}, id="one round of items of two"),
    ],
)
def test_the_last_heads_on_hopper(heads, changes):
    assert plan(LONGEST_FIRST, **changes).heads_longest_first == heads
    assert plan(LONGEST_FIRST, **changes).blocks_per_item == plan(CONFIG, **changes).blocks_per_item


def test_a_program_for_each_block_of_values_to_transpose():
    assert plan(kv_len=4096).transpose_programs == 8 * 32
    assert plan(batch=3, kv_len=1).transpose_programs == plan(batch=3, kv_len=128).transpose_programs == 8 * 3
    assert plan(kv_len=129).transpose_programs == 8 * 2


BLACKWELL = blackwell_config(3, 192)  # 256 rows


def test_rows_of_a_blackwell_config():
    assert plan(BLACKWELL, device=B200).programs == 148
    assert plan(blackwell_config(6, 192, num_ctas=4), device=B200).programs == 37
    assert plan(BLACKWELL, device=B200, heads=2, q_len=300).programs == 4


def test_a_program_for_each_item_where_the_hardware_hands_them_out():
    """And no items of two: who is done first takes the next."""
    dynamic = plan(dataclasses.replace(BLACKWELL, dynamic=True), device=B200)
    assert (dynamic.programs, dynamic.blocks_per_item) == (32 * 16, 1)


def test_no_items_of_two_where_the_longest_come_first():
    assert plan(dataclasses.replace(BLACKWELL, longest_first=True), device=B200).blocks_per_item == 1


@pytest.mark.parametrize(
    ("heads_longest_first", "changes"),
    [
        pytest.param(32, {}, id="all of the problem"),
        # 0.6 of 126 MiB; a KV head of 65536 keys has 32 MiB of K and V, for four query heads.
        pytest.param(8, {"kv_len": 65536}, id="two KV heads"),
        pytest.param(4, {"kv_len": 1 << 20}, id="one KV head, though it does not fit"),
        pytest.param(2, {"kv_len": 65536, "kv_heads": 32}, id="two heads, each with a KV head"),
        pytest.param(16, {"kv_len": 65536, "dtype": torch.float8_e4m3fn}, id="fp8 takes half"),
    ],
)
def test_heads_whose_keys_and_values_are_in_l2_together(heads_longest_first, changes):
    assert plan(BLACKWELL, device=B200, **changes).heads_longest_first == heads_longest_first


def test_compiled_for_the_device():
    assert [plan(BLACKWELL, device=d).arch for d in (B200, Device.blackwell_ultra())] == [100, 103]


def test_scores_are_scaled_for_exp2():
    assert plan().scale_log2 == pytest.approx(0.1 * 1.4426950408889634, rel=1e-15)


def test_more_row_blocks_than_the_kernel_counts():
    with pytest.raises(
        ValueError, match=r"^q: expected fewer than 2\^31 row blocks .*, got 4294967296; split the batch"
    ):
        plan(batch=65536, heads=65536, q_len=1)


def test_longer_than_the_kernel_counts():
    most = 2**31 - 2**12
    assert plan(heads=8, q_len=most, kv_len=most).items > 0
    with pytest.raises(ValueError, match=rf"^q: expected at most {most} positions, .*got {most + 1}; split the sequ"):
        plan(heads=8, q_len=most + 1)
    with pytest.raises(ValueError, match=rf"^k: expected at most {most} positions, .*got {most + 1}; split the sequ"):
        plan(heads=8, kv_len=most + 1)


def test_fewer_processors_than_a_cluster_needs():
    with pytest.raises(ValueError, match=r"^device: expected at least 2 processors.*got 1"):
        plan(TWO_CTAS, dataclasses.replace(H200, sm_count=1))
