"""WebShop: buy the product that an instruction describes in a shop of text pages."""
