"""Static proofs about the compiled Blackwell kernels: no deadlock and no data race under any schedule, without a card.

SentryWard, a verifier of PTX, does the proving. This package compiles a launch (capture.py), puts its PTX into a form
that the verifier decides (rewrites.py), says what the launch is (kernel_input.py), runs the verifier (verifier.py) and
keeps what was proved (store.py). `python -m proving` is the command; docs/proving.md says what a proof covers.
"""

from gluon_attn.runtime.compiler import check_triton_version

check_triton_version(100)  # first, as another release has not even all names that are imported here
