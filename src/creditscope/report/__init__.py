"""One html file of a run: `build` lists its sections, `answers` has the rules of its first screen. No torch."""
