// A browser starts no worker for a page that is opened from the disk, and Material's
// search is one. There an invisible frame runs the worker's script instead; pages that are
// served keep the browser's own. (Material's `offline` plugin would fetch such a script
// from elsewhere.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      // What the script posts arrives here.
      this.inside.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      script.src = url;
      this.inside.document.body.append(script);
    }

    postMessage(data) {
      const event = new MessageEvent("message", { data });
      this.loaded.then(() => this.inside.dispatchEvent(event));
    }
  };
}
