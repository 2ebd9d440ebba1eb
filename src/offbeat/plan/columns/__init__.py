"""Every gang that could train and every replica that could generate, each a column of the planning problem."""
