// What the copy button takes from a diff is the program that it leads to: neither the marks
// in the first column nor the lines that go. Material reads the attribute at the click,
// which this sees before it does.
document.addEventListener(
  "click",
  (event) => {
    const button = event.target.closest(".language-diff [data-clipboard-target]");
    if (button) {
      const code = document.querySelector(button.dataset.clipboardTarget);
      const lines = code.textContent.trimEnd().split("\n");
      button.dataset.clipboardText = lines
        .filter((line) => !line.startsWith("-"))
        .map((line) => line.slice(1))
        .join("\n");
    }
  },
  true,
);
