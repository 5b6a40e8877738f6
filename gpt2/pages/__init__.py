"""What all reports share: JSON, terminal tables, page templates, charts, escaping."""
