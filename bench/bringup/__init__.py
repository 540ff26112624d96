"""The first hours of a card: `python -m bench.bringup` (`make blackwell-bringup`), a report that can be sent back."""
