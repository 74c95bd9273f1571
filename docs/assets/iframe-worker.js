// The search of this site runs in a Worker, and a browser starts none for a page that was opened as a
// file. There this class takes its place: the script runs in a hidden frame of the page.
"use strict";

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.appendChild(frame);
    this.scope = frame.contentWindow;
    this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.scope.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
    // Messages that come before the script has been loaded wait for it.
    this.loaded = this.load(url);
    this.loaded.catch(() => this.dispatchEvent(new Event("error")));
  }

  load(url) {
    return new Promise((resolve, reject) => {
      const script = this.scope.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      this.scope.document.body.appendChild(script);
    });
  }

  postMessage(data) {
    const event = new this.scope.MessageEvent("message", { data });
    this.loaded.then(() => this.scope.dispatchEvent(event), () => {});
  }

  terminate() {
    this.scope.frameElement.remove();
  }
}

if (location.protocol === "file:") {
  window.Worker = FrameWorker;
}
