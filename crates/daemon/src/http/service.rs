//! [`Service`]: an answer to every request. It belongs to no thread; what only the daemon's lane can
//! do is asked of the `desk`.

use std::fmt;
use std::sync::Arc;

use futures_channel::{mpsc, oneshot};
use serde_json::{Map, Value};
use vellum_graph::Nodes;
use vellum_graph::live::Wanted;

use super::access::Access;
use super::call::{Call, understand};
use super::desk::Question;
use super::moment::Moment;
use super::picture::Picture;
use super::problem::Problem;
use super::routes::View;
use super::{Request, Response, metrics, openapi, page, views};

/// Answers requests; clones do the same.
#[derive(Clone)]
pub(super) struct Service {
    questions: mpsc::UnboundedSender<Question>,
    nodes: Nodes,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Service")
    }
}

impl Service {
    /// What answers for the daemon with these nodes, and the questions that its desk gets.
    pub(super) fn new(nodes: Nodes) -> (Service, mpsc::UnboundedReceiver<Question>) {
        let (questions, receiver) = mpsc::unbounded();
        (Service { questions, nodes }, receiver)
    }

    /// Answers a request of somebody who may do what `access` says.
    pub(super) async fn answer(&self, request: &Request, access: &Access) -> Response {
        match self.carry_out(request, access).await {
            Ok(response) => response,
            Err(problem) => problem.response(),
        }
    }

    async fn carry_out(&self, request: &Request, access: &Access) -> Result<Response, Problem> {
        access.check(request)?;
        match understand(request)? {
            Call::Page => Ok(page::response()),
            Call::Document => Ok(Response::new(200, "application/json", openapi::text())),
            Call::Metrics => {
                let wanted = Wanted {
                    sizes: true,
                    ..Wanted::default()
                };
                let picture = self.picture(wanted).await?;
                let text = metrics::text(&picture, self.nodes.cache_budget().map(Arc::as_ref));
                Ok(Response::new(200, metrics::CONTENT_TYPE, text))
            }
            Call::View(view, node) => {
                let text = self.view(view, node.as_deref()).await?;
                Ok(Response::json(text))
            }
            Call::Command(name, arguments) => {
                let text = self.command(name, arguments).await?;
                Ok(Response::json(text))
            }
        }
    }

    async fn view(&self, view: View, node: Option<&str>) -> Result<String, Problem> {
        let wanted = Wanted {
            of: node,
            filenames: matches!(view, View::Disks | View::Disk),
            sizes: view != View::Stats,
            making: false,
        };
        let picture = self.picture(wanted).await?;
        match view {
            View::Disks => Ok(views::disks(&picture)),
            View::Host => Ok(views::host(&picture).to_string()),
            View::Stats => Ok(views::stats(&picture)),
            View::Disk => {
                let node = node.unwrap_or_default();
                let text = || format!("Disk '{node}' not found");
                views::disk(&picture, node).ok_or_else(|| Problem::new(404, text()))
            }
        }
    }

    async fn picture(&self, wanted: Wanted<'_>) -> Result<Picture, Problem> {
        let moment: Moment = self.ask(Question::Look).await?;
        let nodes = self.nodes.inventory(wanted);
        Ok(Picture::new(nodes, moment))
    }

    async fn command(
        &self,
        name: String,
        arguments: Map<String, Value>,
    ) -> Result<String, Problem> {
        let question = |answer| Question::Command {
            name,
            arguments,
            answer,
        };
        Ok(self.ask(question).await??)
    }

    async fn ask<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<T>) -> Question,
    ) -> Result<T, Problem> {
        let (sender, answer) = oneshot::channel();
        let ends = |_| Problem::new(503, "The daemon is ending");
        let question = question(sender);
        self.questions
            .unbounded_send(question)
            .map_err(|_| ends(oneshot::Canceled))?;
        answer.await.map_err(ends)
    }
}
