"""Folder put on the path of SGLang's process, which cannot import Offbeat itself."""
