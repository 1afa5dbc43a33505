// The service's Content-Security-Policy lets no page send a form, so a search opens its address.
document.addEventListener('submit', (event) => {
  event.preventDefault();
  location.href = `${event.target.action}?${new URLSearchParams(new FormData(event.target))}`;
});
