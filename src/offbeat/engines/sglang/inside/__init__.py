"""Folder on the PYTHONPATH of SGLang's process, with code to run there; that process cannot import Offbeat itself."""
