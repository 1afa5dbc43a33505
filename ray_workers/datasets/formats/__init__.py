"""Formats of data: tables, images, masks, arrays, text and archives of them."""
