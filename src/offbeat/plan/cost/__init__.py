"""What a shape of machines takes in seconds and bytes: one file a theme, functions in SI units, no search here."""
