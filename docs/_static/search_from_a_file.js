// The search shows a piece of each page that it finds, and fetches the page for it. A browser
// forbids that for a site that was opened as a file: then the titles alone are shown.
if (location.protocol === "file:") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}
