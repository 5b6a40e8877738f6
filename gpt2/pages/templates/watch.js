// Load the page again while a run goes on; the browser keeps the place.
if (data.refresh > 0) setTimeout(() => location.reload(), 1000 * data.refresh);
