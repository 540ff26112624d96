"""Run attention here, on a card or else on the CPU, and print what it saw and whether it was right."""

import argparse
import sys

from . import demo, explain, lessons, warmup


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def main() -> None:
    if sys.argv[1:2] == ["warmup"]:
        return warmup.main(sys.argv[2:])
    if sys.argv[1:2] == ["learn"]:
        return lessons.main(sys.argv[2:])
    if sys.argv[1:2] == ["explain"]:
        return explain.main(sys.argv[2:])
    demo.quiet_exit()
    command = argparse.ArgumentParser(
        prog="python -m gluon_attn",
        description=__doc__,
        epilog="python -m gluon_attn learn runs a lesson instead, python -m gluon_attn warmup compiles kernels ahead, "
        "python -m gluon_attn explain says which row of the tuning table serves a problem: see their --help",
    )
    command.add_argument("--cpu", action="store_true", help="execute on the CPU also where there is a card")
    command.add_argument(
        "--schedules",
        type=at_least_one,
        metavar="N",
        help=f"on the CPU: execute each case under N schedules, looking for races (default: {demo.SCHEDULES})",
    )
    command.add_argument("--no-kernels", action="store_true", help="compile no kernel to print what it takes of a card")
    options = command.parse_args()
    device = None if options.cpu else demo.card()
    if device is not None and options.schedules is not None:
        command.error("--schedules: expected with --cpu only, as a card has no schedules to choose; add --cpu")
    if device is None:
        problem = demo.run_without_a_card(options.schedules or demo.SCHEDULES, kernels=not options.no_kernels)
    else:
        problem = demo.run_prefill(device, kernels=not options.no_kernels)
    if problem is not None:
        print(f"\nFAILED: {problem}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
