"""On the path of a pod of `endless`: the samples of a step take 200 ms to read, as on slow storage.

Ranks sleep meanwhile. Otherwise they would use every core of the machine for as long as a test waits for something.
"""

import sys
import time

READ_SECONDS = 0.2


class SlowReads:
    """Makes reads slow when the training loop is about to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "meshwright_worker.trainer.training_loop":
            sys.meta_path.remove(self)
            from meshwright_worker.data.prefetch import Prefetcher

            read = Prefetcher._read_step

            def slow(self, first):
                time.sleep(READ_SECONDS)
                return read(self, first)

            Prefetcher._read_step = slow
        return


sys.meta_path.insert(0, SlowReads())
