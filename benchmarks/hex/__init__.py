"""AReaL-Hex's published figures, and our cost model fitted to some of them to predict the others."""
