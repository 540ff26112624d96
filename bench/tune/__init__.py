"""`python -m bench tune`: command.py says what it does, search.py how. forward.py has what can be chosen, card.py what
is done on the card."""
