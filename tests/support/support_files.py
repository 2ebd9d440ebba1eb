"""Where helpers lie that tests start as processes of their own."""

from pathlib import Path

SUPPORT = Path(__file__).parent
