"""Output shared by all reports: JSON, terminal tables, page templates, charts, escaping."""
