(function () {
  "use strict";
  var root = document.documentElement;
  // Some browsers refuse storage to files that are opened from the disk.
  function stored(value) {
    try {
      if (value) localStorage.setItem("zaya-theme", value);
      return localStorage.getItem("zaya-theme");
    } catch (error) {
      return null;
    }
  }
  function dark() {
    var chosen = root.getAttribute("data-theme");
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  var before = stored();
  if (!root.hasAttribute("data-theme") && (before === "dark" || before === "light")) {
    root.setAttribute("data-theme", before);
  }
  // Paper cannot be clicked on.
  var opened = [];
  addEventListener("beforeprint", function () {
    opened = Array.from(document.querySelectorAll("details:not([open]):not(.optional)"));
    opened.forEach(function (details) { details.open = true; });
  });
  addEventListener("afterprint", function () {
    opened.forEach(function (details) { details.open = false; });
  });
  document.addEventListener("DOMContentLoaded", function () {
    var button = document.getElementById("theme");
    function label() {
      button.textContent = dark() ? "Light" : "Dark";
      button.setAttribute("aria-label", "Switch to " + (dark() ? "light" : "dark") + " colours");
    }
    button.hidden = false;
    label();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
    button.addEventListener("click", function () {
      var next = dark() ? "light" : "dark";
      root.setAttribute("data-theme", next);
      stored(next);
      label();
    });
  });
})();
