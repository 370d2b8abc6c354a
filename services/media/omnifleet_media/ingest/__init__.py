"""From what a caller sent to plain source bytes of a known type. Opens no path and no URL; decodes no pixel."""
