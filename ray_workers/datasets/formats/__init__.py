"""Data formats: tables, images, masks, arrays, text and archives."""
