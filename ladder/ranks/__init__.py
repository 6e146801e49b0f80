"""How ranks start, meet, sum, watch one another and end."""
