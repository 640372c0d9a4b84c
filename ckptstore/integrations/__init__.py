"""One module per third party; each imports it only when it is used."""
