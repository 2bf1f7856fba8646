"""On the path of a pod whose image has no torch, as many images of users' commands have none."""

import sys

sys.modules["torch"] = None  # what `import torch` and `find_spec` take for a module that is not there
