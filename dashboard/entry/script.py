"""What `streamlit run` is given; see the package's docstring for why it is alone in its folder."""

import sys

from twinfer.dashboard.app import main

if __name__ == "__main__":
    main(sys.argv[1:])
