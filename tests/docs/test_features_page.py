"""docs/features.md has the tables of gluon_attn/features.py; `python -m tests.docs.test_features_page` writes them."""

import re
from pathlib import Path

from gluon_attn import features

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
README = Path(__file__).parents[2] / "README.md"
REGION = re.compile(r"(<!-- written by tests/docs/test_features_page.py: ([\w ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TABLES = {"supported": features.supported, "apart": features.apart, "not there": features.not_there}


def written(text: str) -> str:
    return REGION.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[4]}", text)


def test_the_page_has_the_tables():
    text = PAGE.read_text(encoding="utf-8")
    assert sorted(m[2] for m in REGION.finditer(text)) == sorted(TABLES)
    assert text == written(text)


# Of README's table, which is shorter: a row's first words, and the features that it stands for.
ROWS = {
    "fp16, bf16, fp8": ("causal",),
    "head dims": ("head dim 128", "head dim 256", "v's head dim"),
    "any lengths, Sq ≠ Sk, packed": ("unequal lengths", "cu_seqlens_q"),
    "grouped-query and multi-query heads": ("grouped heads",),
    "`layout=": ("layout",),
    "CUDA graphs, any stream, `out=`, `scale=`": ("out", "scale"),
    "forward: same bits every run": ("deterministic",),
    "gradients in fp16 and bf16": (),
    "`torch.compile`": (),
    "masks and scores": (
        "window", "chunk", "segment_ids", "mask_mod", "softcap", "alibi_slopes", "sinks", "bias", "score_mod"
    ),
}  # fmt: skip


def test_the_table_of_the_readme_says_the_same():
    readme = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", README.read_text(encoding="utf-8"))
    _, _, table = readme.partition("| all | Hopper: H100, H200 | Blackwell (never run) |\n|---|---|---|\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.partition("\n\n")[0].splitlines()]
    assert len(rows) == len(ROWS)
    for (name, hopper, blackwell), (start, of) in zip(rows, ROWS.items(), strict=True):
        assert name.startswith(start)
        for feature in map(features.FEATURES.get, of):
            assert feature is not None
            assert hopper in ("✓", "up to 256")
            assert feature.hopper[0]
            assert blackwell in ("✓", "not tried", "up to 256, V's 128")
            assert feature.blackwell[0] or feature.name == "head dims up to 256"
        in_fp8 = all(features.FEATURES[feature].hopper[1] for feature in of)
        assert in_fp8 == ("bias in 16 bits" not in name), name
    [gradients] = [row for row in rows if row[0].startswith("gradients")]
    assert gradients[1:] == ["✓", "–"]
    assert not any(feature.blackwell[2] for feature in features.FEATURES.values())
    named = {feature for of in ROWS.values() for feature in of}
    assert set(features.FEATURES) - named == {"return_lse", "q_scale", "num_ctas 2", "num_ctas 4"}


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
