"""What a run shows: live view, dashboard, charts, plots."""
