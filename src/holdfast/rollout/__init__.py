"""From environments to segments: collector, adapter for vector environments, advantages, reward scale."""
