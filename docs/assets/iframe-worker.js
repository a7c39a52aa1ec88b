// The search of the theme runs in a worker, and browsers start none from a file. There a
// frame of this page takes its place.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = source;
          script.onload = resolve;
          script.onerror = reject;
          inside.document.head.append(script);
        });
      inside.importScripts = (...sources) =>
        sources.reduce((done, source) => done.then(() => load(source)), Promise.resolve());
      // What the worker answers; in a worker, messages have no target.
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.inside = inside;
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() =>
        this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })),
      );
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
