// Browsers do not load modules from files, so the studio's frame needs a server; say so instead of an empty frame.
document.addEventListener("DOMContentLoaded", () => {
  const frame = document.querySelector("iframe.studio");
  if (frame && location.protocol === "file:") {
    const note = document.createElement("p");
    note.className = "studio-note";
    note.textContent = "This page was opened as a file, and browsers do not run the studio's modules from files. "
      + "Serve the folder of the site, for example with: python -m http.server --bind 127.0.0.1, or run: partita studio";
    frame.replaceWith(note);
  }
});
