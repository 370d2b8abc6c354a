"""What exists, what refers to what, and who holds it, behind one port. Knows no blob's bytes."""
