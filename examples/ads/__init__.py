"""The example application: ad events and orders in; exact counts, attributions, charges out."""
