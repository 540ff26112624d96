"""What attention computes and what it refuses: one table, which docs/features.md shows. Tests hold it against calls."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# In each of these a feature is there or not. 16 bits: fp16 and bf16, in which gradients are too.
KINDS = ("16 bits", "fp8", "gradients")


@dataclass(frozen=True, kw_only=True)
class Feature:
    """name: in the table's words. hopper, blackwell: in which of KINDS it is there."""

    name: str
    hopper: tuple[bool, bool, bool] = (True, True, True)
    blackwell: tuple[bool, bool, bool] = (True, True, False)


# By an argument that a call has for it, or a word.
FEATURES = {
    "causal": Feature(name="`causal=True`"),
    "window": Feature(name="`window=`"),
    "chunk": Feature(name="`chunk=`"),
    "segment_ids": Feature(name="`segment_ids=`: documents"),
    "mask_mod": Feature(name="`mask_mod=`"),
    "softcap": Feature(name="`softcap=`"),
    "alibi_slopes": Feature(name="`alibi_slopes=`"),
    "sinks": Feature(name="`sinks=`"),
    "bias": Feature(name="`bias=`", hopper=(True, False, True), blackwell=(True, False, False)),
    "score_mod": Feature(name="`score_mod=`"),
    "cu_seqlens_q": Feature(name="packed sequences: `attention_varlen`"),
    "unequal lengths": Feature(name="Sq ≠ Sk, any lengths"),
    "grouped heads": Feature(name="fewer KV heads than query heads"),
    "head dim 128": Feature(name="head dims up to 128"),
    "head dim 256": Feature(name="head dims up to 256", blackwell=(False, False, False)),
    "v's head dim": Feature(name="v's head dim unlike q's"),
    "layout": Feature(name='`layout="bhsd"`, `"bshd"`'),
    "scale": Feature(name="`scale=`"),
    "return_lse": Feature(name="`return_lse=True`"),
    "deterministic": Feature(name="`deterministic=True`"),
    "out": Feature(name="`out=`", hopper=(True, True, False)),
    "q_scale": Feature(
        name="`q_scale=`, `k_scale=`, `v_scale=`", hopper=(False, True, False), blackwell=(False, True, False)
    ),
    "num_ctas 2": Feature(name="clusters of 2 CTAs: `num_ctas=2`"),
    "num_ctas 4": Feature(name="clusters of 4 CTAs: `num_ctas=4`", hopper=(False, False, False)),
}

# Of two arguments that exclude each other, what to do instead. All others go together.
APART = {
    ("softcap", "alibi_slopes"): "write one score_mod that does both",
    ("softcap", "score_mod"): "write one score_mod that does both",
    ("alibi_slopes", "score_mod"): "write one score_mod that does both",
    ("softcap", "bias"): "write one score_mod that does both",
    ("alibi_slopes", "bias"): "add the slopes to the bias",
    ("score_mod", "bias"): "have the score_mod read it",
    ("segment_ids", "mask_mod"): "write one mask_mod that does both",
    ("cu_seqlens_q", "segment_ids"): "give each document as a sequence",
    ("cu_seqlens_q", "bias"): "call attention() for each sequence",
}

# Arguments that others have for what is not there at all.
NOT_THERE = {
    **dict.fromkeys(("attn_mask", "attention_mask", "block_mask"), "a mask given as a tensor"),
    **dict.fromkeys(("block_table", "page_table"), "a paged KV cache"),
    **dict.fromkeys(("cache_seqlens", "k_cache", "v_cache"), "a KV cache"),
    **dict.fromkeys(("dropout", "dropout_p"), "dropout"),
    "qv": "a product of Q with V",
}

# What to do instead of giving them, where there is something.
INSTEAD = {"a mask given as a tensor": "write it as a mask_mod, or give a bias with -inf where a key is hidden"}


def refuse_together(given: Collection[str]) -> None:
    """NotImplementedError for two arguments of a call that APART has. given: names of all that it has."""
    for (first, second), todo in APART.items():
        if first in given and second in given:
            raise NotImplementedError(f"{second}: not supported together with {first}; {todo}")


def supported() -> str:
    """Markdown: a row for each feature, a column for each card and kind; Blackwell has no gradients."""
    columns = [f"Hopper: {kind}" for kind in KINDS] + [f"Blackwell: {kind}" for kind in KINDS[:2]]
    rows = [(f.name, *("✓" if there else "–" for there in f.hopper + f.blackwell[:2])) for f in FEATURES.values()]
    return markdown(("", *columns), rows)


def apart() -> str:
    """Markdown: a row for each of APART."""
    return markdown(("", "with", "instead"), [(f"`{b}`", f"`{a}`", todo) for (a, b), todo in APART.items()])


def not_there() -> str:
    """Markdown: a row for each thing of NOT_THERE."""
    names = {what: [name for name in NOT_THERE if NOT_THERE[name] == what] for what in NOT_THERE.values()}
    rows = [(what, ", ".join(f"`{name}`" for name in asked)) for what, asked in names.items()]
    return markdown(("", "arguments"), rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
