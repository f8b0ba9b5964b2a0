"""Published early-exit networks as staged models; they can load their authors' weights."""
