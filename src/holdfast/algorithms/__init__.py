"""Learning algorithms as readable pages. How they run is in `engines`."""
