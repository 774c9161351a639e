"""kvtide's demo, sweeps and charts."""
