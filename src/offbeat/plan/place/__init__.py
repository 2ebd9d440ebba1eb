"""From counts to machines: which nodes train and which roll out, how groups lie on them, and how weights reach all."""
