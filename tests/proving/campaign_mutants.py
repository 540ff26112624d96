"""Break each synchronisation operation of a compiled kernel, one by one: is it rejected? Lists what is not.

    python -m tests.proving.campaign_mutants d64-bf16-full-1cta

A survivor is redundant under the launch of that proof, or a hole in the proof: look at each. Exit status 0.
"""

import argparse
import collections
import fnmatch

from proving.attention import catalogue
from proving.ptx import source_line
from tests.proving.mutations import mutants, verdict_of_mutant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("proof", help="a name from `python -m proving list`")
    parser.add_argument("--kind", default="*", help="only mutants of kinds that match, such as 'no wait'")
    args = parser.parse_args()
    proof = next(proof for proof in catalogue() if proof.name == args.proof)
    launch = proof.launch()
    results: collections.Counter[tuple[str, str]] = collections.Counter()
    chosen = [mutant for mutant in mutants(launch.ptx) if fnmatch.fnmatch(mutant.kind, args.kind)]
    for i, mutant in enumerate(chosen):
        verdict = verdict_of_mutant(proof, launch, mutant)
        results[mutant.kind, verdict.result] += 1
        place = f"{mutant}, {source_line(launch.ptx, mutant.line)}"
        print(f"[{i + 1}/{len(chosen)}] {place:50} {verdict.result:17} {verdict.seconds:6.1f} s", flush=True)
    for (kind, result), count in sorted(results.items()):
        print(f"{kind:20} {result:20} {count}")


if __name__ == "__main__":
    main()
