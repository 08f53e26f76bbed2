"""HTML from records: plots, tables, verdicts. Needs the extra `report` (plotly)."""
