"""The wire: stubs generated from proto/ (never edited) and codecs between them and `omnifleet.types`."""
