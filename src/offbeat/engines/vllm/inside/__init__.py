"""Folder put on the path of vLLM's processes, which cannot import Offbeat itself."""
