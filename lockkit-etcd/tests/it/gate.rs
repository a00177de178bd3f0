//! Members that answer all requests but those of some methods, which hang, or whose watches stop.

use std::{
    future::pending,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use hyper::{
    Request,
    body::{Body, Frame, Incoming},
    client, server,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
};

/// A way to a server on which the calls of some methods hang, once it is shut. It speaks HTTP/2, so that it tells them apart. Dropping it ends all
/// connections.
pub(crate) struct Gate {
    pub(crate) addr: SocketAddr,
    is_shut: Arc<AtomicBool>,
    task: AbortHandle,
}

impl Gate {
    /// Calls of these methods, such as `LeaseKeepAlive`, will hang. It is open at first.
    pub(crate) async fn start(upstream: SocketAddr, methods: &'static [&'static str]) -> Self {
        let is_shut = Arc::new(AtomicBool::new(false));
        let shut = is_shut.clone();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, upstream, methods, shut.clone()));
            }
        });
        Self {
            addr,
            is_shut,
            task: task.abort_handle(),
        }
    }

    /// From now on new calls hang.
    pub(crate) fn shut(&self) {
        self.is_shut.store(true, Ordering::SeqCst);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    stream: TcpStream,
    upstream: SocketAddr,
    methods: &'static [&'static str],
    is_shut: Arc<AtomicBool>,
) {
    let member = TcpStream::connect(upstream).await.unwrap();
    let shaken = client::conn::http2::handshake::<_, _, Incoming>(TokioExecutor::new(), TokioIo::new(member));
    let (sender, work) = shaken.await.unwrap();
    let service = service_fn(move |request: Request<Incoming>| {
        let (mut sender, is_shut) = (sender.clone(), is_shut.clone());
        async move {
            let path = request.uri().path();
            if is_shut.load(Ordering::SeqCst) && methods.iter().any(|method| path.ends_with(method)) {
                return pending().await;
            }
            sender.send_request(request).await
        }
    });
    let serving = server::conn::http2::Builder::new(TokioExecutor::new())
        .serve_connection(TokioIo::new(stream), service);
    // Either end is the end.
    tokio::select! {
        _ = serving => {}
        _ = work => {}
    }
}

/// An answer whose rest does not come, once it has stopped.
struct Stopping {
    answer: Incoming,
    stopped: Option<Arc<AtomicBool>>,
}

impl Body for Stopping {
    type Data = <Incoming as Body>::Data;
    type Error = <Incoming as Body>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let next = Pin::new(&mut self.answer).poll_frame(cx);
        match &self.stopped {
            Some(stopped) if stopped.load(Ordering::SeqCst) => Poll::Pending,
            _ => next,
        }
    }
}

/// A way to a server on which the streams of watches stop, with all else going on.
pub(crate) async fn stops_watches(upstream: SocketAddr) -> (SocketAddr, Arc<AtomicBool>) {
    let stopped = Arc::new(AtomicBool::new(false));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let flag = stopped.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let flag = flag.clone();
            tokio::spawn(async move {
                let member = TcpStream::connect(upstream).await.unwrap();
                let io = TokioIo::new(member);
                let shaken = client::conn::http2::handshake::<_, _, Incoming>(TokioExecutor::new(), io).await;
                let (sender, work) = shaken.unwrap();
                let service = service_fn(move |request: Request<Incoming>| {
                    let (mut sender, flag) = (sender.clone(), flag.clone());
                    async move {
                        let is_watch = request.uri().path().ends_with("/Watch");
                        let stopped = is_watch.then_some(flag);
                        let answer = sender.send_request(request).await?;
                        Ok::<_, hyper::Error>(answer.map(|answer| Stopping { answer, stopped }))
                    }
                });
                let serving = server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service);
                tokio::select! {
                    _ = serving => {}
                    _ = work => {}
                }
            });
        }
    });
    (addr, stopped)
}
