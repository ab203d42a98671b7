"""Published training runs against predictions of the same runs, error by source. Nothing is fitted here."""
