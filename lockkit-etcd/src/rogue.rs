//! Servers that answer what no server answers, for tests.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use http::{HeaderMap, HeaderValue, Request, Response};
use hyper::{
    body::{Body, Bytes, Frame, Incoming},
    server::conn::http2::Builder,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::net::TcpListener;

/// The frames of an answer.
pub(crate) struct Answer(VecDeque<Frame<Bytes>>);

impl Answer {
    /// Answers with this message.
    pub(crate) fn of(message: &impl Message) -> Response<Self> {
        let message = message.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        let message = [&[0][..], &length, &message[..]].concat();
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        let frames = [Frame::data(message.into()), Frame::trailers(trailers)];
        Self::with(HeaderMap::new(), frames.into())
    }

    /// Refuses a request, with this status and text.
    pub(crate) fn refusal(status: &'static str, text: &'static str) -> Response<Self> {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-status", HeaderValue::from_static(status));
        headers.insert("grpc-message", HeaderValue::from_static(text));
        Self::with(headers, VecDeque::new())
    }

    fn with(mut headers: HeaderMap, frames: VecDeque<Frame<Bytes>>) -> Response<Self> {
        headers.insert("content-type", HeaderValue::from_static("application/grpc"));
        let mut answer = Response::new(Self(frames));
        *answer.headers_mut() = headers;
        answer
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(Ok))
    }
}

/// Starts a server that answers all requests so, and returns its address.
pub(crate) async fn serve<F, A>(answers: F) -> String
where
    F: Fn(Request<Incoming>) -> A + Clone + Send + 'static,
    A: Future<Output = Response<Answer>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let host = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let answers = answers.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let answer = answers(request);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            let serving = Builder::new(TokioExecutor::new());
            tokio::spawn(serving.serve_connection(TokioIo::new(client), service));
        }
    });
    host
}
