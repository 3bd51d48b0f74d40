"""`python -m examples.ads COMMAND`, from the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ads.main import main

if __name__ == "__main__":
    main()
