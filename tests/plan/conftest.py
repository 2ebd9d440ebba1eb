"""Puts the problems and shapes that the folders below share within their reach."""
