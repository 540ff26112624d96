"""By what launches are kept: equal for calls that one launch serves, and for no others."""

from typing import Any

import pytest
import torch

from gluon_attn.call import Extras, Options, key_of


def key(options: Options = Options(), extras: Extras = Extras(), **tensors: Any) -> Any:  # noqa: B008 - immutable
    q = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)
    return key_of(tensors.get("q", q), tensors.get("k", q), tensors.get("v", q), extras, options)


def test_new_memory_has_the_same_key():
    assert key() == key()
    assert hash(key()) == hash(key())
    assert key(extras=Extras(out=torch.zeros(2))) == key(extras=Extras(out=torch.ones(2)))


OTHERS: dict[str, dict[str, Any]] = {
    "another length": {"k": torch.zeros(1, 2, 17, 64, dtype=torch.bfloat16)},
    "another dtype": {"v": torch.zeros(1, 2, 16, 64, dtype=torch.float16)},
    "other strides": {"q": torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16).transpose(1, 2)},
    "another option": {"options": Options(causal=True)},
    "1, which is not True": {"options": Options(causal=1)},  # type: ignore[arg-type]
    "a tensor more": {"extras": Extras(out=torch.zeros(2))},
    "the same tensor for something else": {"extras": Extras(q_scale=torch.zeros(2))},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_have_other_keys(name):
    assert key(**OTHERS[name]) not in [key(), *(key(**given) for other, given in OTHERS.items() if other != name)]
