// The table of all methods, told by its headings, is sorted by a click on one of them,
// and a form above it says what each row's bytes and messages cost on the reader's link.
// Without this script it is a plain table.
(() => {
  const WANTED = ["method", "kind", "bytes", "messages", "hidden"];
  const TEXTS = ["method", "kind"]; // The other columns are numbers.
  const COMPUTED = ["seconds a step", "computes"];
  const FIELDS = [
    // name, label, value, least
    ["gbits", "Link, Gbit/s", 1, 1e-6],
    ["latency", "Latency, ms", 0, 0],
    ["billions", "Parameters, billions", 1, 0],
    ["seconds", "Seconds a step computes", 1, 1e-6],
    ["least", "Computes at least, %", 0, 0],
  ];
  const SAYS = `To send what one step sends takes a worker latency × messages + 8 × bytes ×
    parameters / link seconds. It waits for all of them but for those that are "hidden",
    at most this share of the seconds that a step computes. "Computes" is the share of the
    time in which it does not wait. This is the arithmetic of audit.time for simple links, as if
    every step sent the same.`;

  const make = (tag, properties, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // The first number of a cell, with its sign; NaN where there is none.
  const number = (text) => {
    const found = text.replaceAll(",", "").match(/[-+−]?\d+(\.\d+)?(e[-+]?\d+)?/i);
    return found ? Number(found[0].replace("−", "-")) : NaN;
  };

  // Seconds of a step, and the per cent of them that is computation.
  const cost = (bytes, messages, hidden, link) => {
    const bits = 8 * bytes * link.billions * 1e9;
    const sent = (link.latency / 1e3) * messages + bits / (link.gbits * 1e9);
    const waits = Math.max(0, sent - hidden * link.seconds);
    return [link.seconds + waits, (100 * link.seconds) / (link.seconds + waits)];
  };

  const enhance = (table, names) => {
    const head = table.tHead.rows[0], body = table.tBodies[0], rows = [...body.rows];
    const place = names.indexOf("bytes"); // Beside the loss: seen without scrolling.
    names.splice(place, 0, ...COMPUTED);
    for (const row of [head, ...rows])
      for (const _ of COMPUTED) row.cells[place].before(row.cells[place].cloneNode());
    const text = (row, name) => row.cells[names.indexOf(name)].textContent.trim();

    const sorted = { by: null, up: true };
    const value = (row) => {
      const said = text(row, sorted.by);
      if (TEXTS.includes(sorted.by)) return said;
      return Number(row.cells[names.indexOf(sorted.by)].dataset.value ?? number(said));
    };
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      const [less, more] = [x, y].map((one) => one === "" || Number.isNaN(one));
      if (less || more) return less - more; // Rows without it are last both ways.
      const order = typeof x === "string" ? x.localeCompare(y, "en") : x - y;
      return sorted.up ? order : -order;
    };
    const sort = () => sorted.by && body.append(...[...rows].sort(compare));

    const inputs = FIELDS.map(([name, , value, min]) =>
      make("input", { type: "number", step: "any", required: true, name, min, value }),
    );
    const words = make("input", { type: "search", name: "words" });
    const shown = make("output");
    const labels = inputs.map((input, at) => make("label", {}, FIELDS[at][1], input));
    const form = make("form", { className: "link" }, ...labels);
    form.append(make("label", {}, "Method or kind", words), shown);

    const refresh = () => {
      const valid = form.checkValidity();
      const link = Object.fromEntries(inputs.map((one) => [one.name, Number(one.value)]));
      const wanted = words.value.toLowerCase().split(/\s+/);
      for (const row of rows) {
        const bytes = number(text(row, "bytes")), messages = number(text(row, "messages"));
        const known = valid && !Number.isNaN(bytes + messages);
        const hidden = number(text(row, "hidden")) || 0;
        const found = known && cost(bytes, messages, hidden, link);
        for (const at of COMPUTED.keys()) {
          const cell = row.cells[place + at];
          const digits = { maximumSignificantDigits: 3 };
          cell.dataset.value = known ? found[at] : NaN;
          cell.textContent = known ? found[at].toLocaleString("en", digits) : "";
          if (known && at) cell.textContent += " %";
        }
        const named = `${text(row, "method")} ${text(row, "kind")}`.toLowerCase();
        row.hidden = !wanted.every((word) => named.includes(word));
        row.hidden ||= known && found[1] < link.least;
      }
      sort();
      const count = rows.filter((row) => !row.hidden).length;
      shown.textContent = `${count} of ${rows.length} methods are shown.`;
      if (!valid) shown.textContent += " A number above is missing or too small.";
    };

    names.forEach((name, at) => {
      const button = make("button", { type: "button", textContent: name });
      button.addEventListener("click", () => {
        sorted.up = sorted.by !== name || !sorted.up;
        sorted.by = name;
        for (const cell of head.cells) cell.removeAttribute("aria-sort");
        head.cells[at].setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
        sort();
      });
      head.cells[at].replaceChildren(button);
    });
    form.addEventListener("input", refresh);
    form.addEventListener("submit", (event) => event.preventDefault());
    const outer = table.closest(".md-typeset__scrollwrap") ?? table;
    outer.before(make("p", { textContent: SAYS.replace(/\s+/g, " ") }), form);
    table.dataset.sorts = ""; // No class: Material styles tables without one.
    refresh();
  };

  for (const table of document.querySelectorAll("article table:not([class])")) {
    const heads = [...table.querySelectorAll("thead th")].map((th) => th.textContent.trim());
    if (WANTED.every((name) => heads.includes(name))) enhance(table, heads);
  }
})();
