"""How worker processes of an embedded Ray start: forked from one that has Ray imported."""
